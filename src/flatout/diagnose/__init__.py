"""DIAGNOSE: from a Trace to what it means. Reads saved traces only; never imports torch or what runs inside.

    Trace ──breakdown──► Breakdown     where the wall time went; the parts add up
      └──rank_metrics──► RankMetrics   the figures the rules reason about (replay: a step without one of its causes)
              └──rules──► Findings     loading, copy, compute, machine and rank rules; ignored_settings

`gains` says what each finding would give, `find_knobs` where the script reads a setting. Causes and changes
are defined in `model`.
"""
