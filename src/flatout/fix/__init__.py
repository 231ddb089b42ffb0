"""FIX: from findings to changes that were measured, kept or undone, and proven.

    Trace ──offers──► Offer ──trials──► runs of the user's command ──speed──► kept or undone   (search)
                                             │
                                             └─ with fingerprints ──proof_runs, proof──► verdicts
                                                                                            │
                                        flatout-plan.yaml ◄── FixResult (result) ◄──────────┘

It works from outside: it starts runs (`runs`, by `launch`) and reads what they leave. It never imports torch,
nor what makes changes inside: a Plan goes in, a Trace comes back. `fix_command` is all of it, for one command.
"""
