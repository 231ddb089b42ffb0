"""REPORT: what a person sees of a Trace. Building the data is apart from drawing it.

Trace ──account──► Account ──terminal──► text
                           └─json──────► `--json`
"""
