"""The command line, installed as ``gradtrace_cli``: one file a command, each a thin click function."""
