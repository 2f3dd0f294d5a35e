"""Exports: the results of a job that is over, as files of a folder or of an object store."""
