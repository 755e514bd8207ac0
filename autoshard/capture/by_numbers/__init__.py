"""What a forward does by the numbers in its tensors: rows that masks pick, experts in a loop, rows sorted by their
groups, shapes, and which way Python goes. A plan is made without numbers; so it is written as what has none, held to
those of an example where the caller says so (:mod:`.representative`), or refused (:mod:`.static_shapes`).
"""
