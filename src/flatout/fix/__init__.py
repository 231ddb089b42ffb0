"""FIX: from findings to changes that were measured, kept or undone, and proven.

    Trace ──offers──► Offer ──trials──► runs of the user's command ──speed──► kept or undone   (search)
                                             └─ with fingerprints ──proof_runs, proof──► verdicts
    flatout-plan.yaml ◄── FixResult (result) ◄──────────────────────────────────────────────┘

It works from outside: a Plan goes into a run (`runs`, by `launch`), a Trace comes back. It never
imports torch.
"""
