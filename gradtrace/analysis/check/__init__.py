"""What precedes a NaN or wastes a run: rules, each a small SQL file in ``rules/``, asked of a recording."""
