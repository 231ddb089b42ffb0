"""`flatout top`: see what the GPU really does.

    sample_source   the machine now, or a recording ─► Sample
      │
      ├──────────────► view     the live terminal view (the only part that imports Textual)
      ├──────────────► summary  a line a sample when stdout is not a terminal; --csv: a row a sample
      ├──────────────► trace    --record: a Trace, which --replay reads again
      ▼
    figures  mean, deviation, quantiles, fluctuation, idle time, energy: in bounded memory
      ▼
    summary  one word and its reason, targets met or missed ─► text, JSON, and the gate (--fail-below)

`top_command.run` ties these together. docs/TOP.md defines every number.
"""
