"""Functions of torch that cannot be cut, written in a traced forward as parts that can (:mod:`.take_apart`)."""
