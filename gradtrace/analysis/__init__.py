"""Questions to a recorded file. Uses duckdb, never torch."""
