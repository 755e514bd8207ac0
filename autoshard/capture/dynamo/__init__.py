"""Torch's dynamo, which runs a model's Python symbolically. Its private APIs stand in this folder alone (torch 2.11 to
2.13).

Besides the graph (:mod:`.tracing`) dynamo knows what else the forward does to Python objects (:mod:`.side_effects`) and
which Python values it read on the way (:mod:`.guards`). Both would be lost with the graph alone: a side effect would
never happen, and a value that changes later would be ignored. What Python does that dynamo does not follow by itself is
in :mod:`.followed` and :mod:`.draws_left_out`; by which numbers Python goes, in :mod:`.ways`.
"""
