"""Train a small residual network to tell shapes apart in crops of synthetic images."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

CANVAS = 32


def draw_images(count: int, generator: torch.Generator):
    """Return images [count, 1, 32, 32] and labels [count]: a disc, a square or a cross on a plain ground."""
    labels = torch.randint(3, (count,), generator=generator)
    center = 12 + 8 * torch.rand(2, count, 1, 1, generator=generator)
    radius = 5 + 3 * torch.rand(count, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(CANVAS), torch.arange(CANVAS), indexing="ij")
    dy, dx = (rows - center[0]).abs(), (columns - center[1]).abs()
    disc = dy.square() + dx.square() <= radius.square()
    square = torch.maximum(dy, dx) <= radius
    cross = (torch.minimum(dy, dx) <= radius / 3) & square
    inside = torch.where((labels == 0)[:, None, None], disc, square)
    inside = torch.where((labels == 2)[:, None, None], cross, inside)
    ground, ink = 0.5 * torch.rand(2, count, 1, 1, generator=generator)
    return torch.where(inside, 0.5 + ink, ground)[:, None], labels


def random_crop(images, size: int, generator: torch.Generator):
    """Cut one window of size x size, at the same place, out of all images."""
    top, left = torch.randint(CANVAS - size + 1, (2,), generator=generator).tolist()
    return images[:, :, top : top + size, left : left + size]


def standardize(images):
    """Give every image mean 0 and standard deviation 1."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images - mean) / images.std(dim=(1, 2, 3), keepdim=True)


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResidualNetwork(nn.Module):
    """Images [batch, 1, n, n] become scores [batch, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
        self.classifier = nn.Linear(64, 3)

    def forward(self, images):
        return self.classifier(self.stages(self.stem(images)).mean(dim=(2, 3)))


def main() -> None:
    """Train, then print the accuracy on new images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--crop", type=int, default=24, help="side of the window cut from each image")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = ResidualNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    for step in range(args.steps):
        images, labels = draw_images(args.batch_size, generator)
        scores = model(standardize(random_crop(images, args.crop, generator)))
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        images, labels = draw_images(256, generator)
        scores = model(standardize(random_crop(images, args.crop, generator)))
    print(f"accuracy on new images: {(scores.argmax(dim=1) == labels).float().mean():.3f}")


if __name__ == "__main__":
    main()
