"""The code between the outputs of a model and ``backward()``, outside of every module."""
