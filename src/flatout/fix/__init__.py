"""FIX: from findings to changes that were measured, kept or undone, and proven.

    Trace ──offers (knobs)──► Offers ──trial──► runs of the user's command ──speed──► kept or undone
                                                         │
                                                         └─ with fingerprints ──proof──► identical, reseeded, equivalent
                                                                                            │
                                             flatout-plan.yaml ◄── FixResult─────────────────┘

It works from outside: it starts runs (`running`, by `launch`) and reads what they leave. It never imports torch, nor
what applies changes inside (`inside`): a Plan goes in, a Trace comes back.
"""
