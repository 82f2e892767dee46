"""The torch side: watches a training run. Never imports duckdb."""
