"""A training that takes hold of all that a process has: signals, hooks for exceptions, streams, the directory.

Ends with exit code 3, by the handler of SIGTERM, once it has saved what there is to save; or with an error that a
module raises, shown by a hook of its own.
"""

import copy
import gc
import io
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)


class Bad(nn.Module):
    def forward(self, x):
        raise ValueError("a bad module")


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x * 0)


def step():
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(loss.item())


def save(folder):
    os.makedirs(folder)
    os.chdir(folder)
    os.environ.clear()
    torch.save(model, "model.pt")
    torch.save(model.state_dict(), "state.pt")
    torch.save(copy.deepcopy((model, optimizer, schedule)), "all.pt")
    torch.save(optimizer.state_dict(), "optimizer.pt")
    with open("pickled.pkl", "wb") as file:
        pickle.dump((optimizer.param_groups[0]["lr"], schedule.state_dict()), file)
    model.load_state_dict(torch.load("state.pt"), assign=False)
    optimizer.load_state_dict(torch.load("optimizer.pt"))


def in_a_thread():
    step()
    raise KeyError("in a thread")


def shown(kind, error, trace):
    print("excepthook:", kind.__name__, error, [frame.name for frame in traceback.extract_tb(trace)], file=sys.stderr)


def leave(number, frame):
    print("SIGTERM: saved", len(model.state_dict()))
    sys.exit(3)


sys.excepthook = shown
threading.excepthook = lambda args: print("thread:", args.exc_type.__name__, args.exc_value, file=sys.stderr)
sys.unraisablehook = lambda args: print("unraisable:", args.exc_type.__name__)
signal.signal(signal.SIGTERM, leave)
sys.setrecursionlimit(600)
gc.disable()
gc.freeze()
logging.basicConfig(stream=sys.stdout, format="%(name)s")
logging.captureWarnings(True)
step()
save(sys.argv[1])
thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
quitting = threading.Thread(target=sys.exit, args=(9,))
quitting.start()
quitting.join()

model.append(Bad())
try:
    step()
except ValueError:
    print("frames:", len(traceback.extract_tb(sys.exc_info()[2])) > 0)
model[3] = Root()
with torch.autograd.detect_anomaly(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        step()
    except RuntimeError as error:
        print(error)
print("forward call:", [str(warning.message) for warning in caught])
del model[3]

stream, sys.stderr = sys.stderr, io.StringIO()
warnings.simplefilter("error")
optimizer.zero_grad()
model[2].weight.data[0, 0] = float("nan")
step()
print("on stderr:", sys.stderr.getvalue())
sys.stderr = stream
print(sys.getrecursionlimit(), gc.isenabled(), os.path.basename(os.getcwd()), list(os.environ))
if sys.argv[2] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        step()
model.append(Bad())
step()
