"""Tables in and out: rows of files and databases, as Arrow; `pip install 'nightjar-batch[tables]'`.

Modules that import pyarrow are imported by name, where a table is read or written.
"""
