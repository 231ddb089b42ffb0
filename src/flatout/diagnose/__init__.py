"""DIAGNOSE: from a Trace to what it means. Reads saved traces only; never imports torch or sense.

Trace ──breakdown──► Breakdown   where the wall time went; the parts add up
"""
