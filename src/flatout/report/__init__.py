"""REPORT: what a person sees of a run, of two runs compared, or of a fix.

folders ─► account ─► RecordedRun ─┐
two runs ─► compare ─► Comparison ─┼─► report: Report ─┬─► terminal   text
a fix ─► fix_summary ─► FixSummary ┘                   ├─► page       one HTML file (markup, charts ◄─ chart_data)
                                                       └─► to_json    the documented JSON

`findings` puts findings and changes into words for all of them.
"""
