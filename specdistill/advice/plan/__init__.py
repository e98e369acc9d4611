"""Choose a method for a target before anything is trained.

Only configs and published figures are used; no target or draft is run.
"""
