"""Reads input files and writes result files."""
