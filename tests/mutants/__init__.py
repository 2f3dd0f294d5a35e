"""Mutants: does a test fail when the code is wrong?

`python -m tests.mutants` (`make test-mutants`) plants one small fault after the other in the
store, the pipeline and the worker, and runs the tests of the module that holds it.

The mutants come from cosmic-ray, used as a library. It rewrites the text of a file and knows
nothing of packages. mutmut 3 does not fit: it copies every version of a function into one module
and chooses by the name of the module, which it derives from the path. Here `jobs/store/leases.py`
is imported through a link as `nightjar.jobs.store.leases`, so the names never agree, no mutant is
ever active, and all of them "survive". Statements that are built at import, such as those of
`jobs/store`, are outside of functions, and mutmut leaves them alone.
"""
