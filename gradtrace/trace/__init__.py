"""The file: what a record is and how it is kept. Knows neither torch nor duckdb."""
