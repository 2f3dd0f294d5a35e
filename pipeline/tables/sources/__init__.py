"""Where rows come from: JSON lines, CSV, Parquet and SQL queries."""
