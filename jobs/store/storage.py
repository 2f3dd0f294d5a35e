"""How PostgreSQL stores each table: room for new versions of rows, and when it is vacuumed.

The server's own settings are for tables whose rows seldom change. It vacuums a table after changes
to a fifth of its rows: with a hundred million requests that is too late, and with ten jobs that
change a thousand times a second, each index entry leads through dead versions meanwhile.
docs/guides/database.md has the reasons of each line.
"""

from typing import TypeAlias

Storage: TypeAlias = dict[str, float]

# Few rows, each of which changes all the time. A new version fits into its page, and changes no
# index; what is dead goes when the page is read next.
COUNTERS: Storage = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 500,
    "autovacuum_vacuum_cost_delay": 0,
}
# Rows that pass through several states, and then stay.
PASSING: Storage = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 5_000,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_vacuum_insert_threshold": 50_000,
    "autovacuum_analyze_scale_factor": 0.02,
    "autovacuum_analyze_threshold": 5_000,
}
# The rows of a micro-batch end in one transaction. Half of each page is for their new versions, or
# these go to other pages and into every index: that was 8% of what is written for a row.
REQUESTS: Storage = {"fillfactor": 50} | PASSING
# Rows that are inserted and, much later, deleted.
KEPT: Storage = {
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_vacuum_insert_threshold": 50_000,
    "autovacuum_analyze_scale_factor": 0.05,
}
# Rows that are deleted soon; the large ones lie in the table's TOAST table.
SOON_DELETED: Storage = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1_000,
    "toast.autovacuum_vacuum_scale_factor": 0.02,
    "toast.autovacuum_vacuum_threshold": 5_000,
}
