"""A failing pass: noticed, kept, run again without a trace, and stopped if that was asked for."""
