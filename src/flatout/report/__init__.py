"""REPORT: what a person sees of a Trace. Building the data is apart from drawing it.

Trace ──account──► Account ─┬─terminal, findings──► text, `--json`
  │                         │
  └──────picture────────────┴─html (detail, drawing, markup, page.css, page.js)──► one file, `--html`

two Traces ──compare──► Comparison ──compare_views──► text, one file; `--json` is its own
Found (of a fix) ──fixed (permanent)──► FixReport ──fix_views──► the same three
"""
