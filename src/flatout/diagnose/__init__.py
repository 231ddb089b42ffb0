"""DIAGNOSE: from a Trace to what it means. Reads saved traces only; never imports torch or what runs inside.

    Trace ──breakdown──► where the wall time went, by phase and by line
      └──rank_metrics──► RankMetrics, the figures that the rules reason about
              │          (machine: of the hardware, and of the loader's workers)
              └──rules──► findings of loading, host, compute and machine rules, and settings without effect,
                    │     each with what fixing it alone would give (gains)
                    └──by_cause──► the account by cause, which bounds what a finding may promise

Causes and changes are defined in `model`.
"""
