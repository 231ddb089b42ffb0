"""DIAGNOSE: from a Trace to what it means. Reads saved traces only; never imports torch or what runs inside.

Trace ──breakdown──► Breakdown   where the wall time went; the parts add up
  └─────case───────► Case        the figures the rules reason about (replay: a step without one of its causes)
           └─rules─► Findings    one small function a cause: data, compute, machine, configured
"""
