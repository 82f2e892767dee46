"""The failing step on disk, and the same step again in the mended script."""
