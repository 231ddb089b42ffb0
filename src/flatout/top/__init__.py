"""`flatout top`: see what the GPU really does.

    source   the machine now, or a recording ─► Sample (readings: what it says that is no field of it)
      │
      ├──────────────► view     the live terminal view (the only part that imports Textual)
      ├──────────────► text     a line a sample, when stdout is not a terminal
      ├──────────────► table    --csv: a row a sample
      ├──────────────► trace    --record: a Trace, which --replay reads again
      ▼
    figures  mean, deviation, quantiles, fluctuation, idle time, energy: in bounded memory
      ├─ verdict   one word and its reason
      └─ targets   met or missed
          ▼
    summary  all of it ─► text, JSON, and the gate (--fail-below)

`session.run` ties these together. docs/TOP.md defines every number.
"""
