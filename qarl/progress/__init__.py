"""Says how far a long step is: a live line on a terminal, and a line a minute in a file.

    from qarl.progress import live

    with live.phase("update", total=8, unit="micro-batches") as phase:
        for rows in micro_batches:
            ...
            phase.advance()

A phase may lie within others. The line names all of them, and has the numbers of the innermost:

    step 3/100, update (18 s): 3 of 8 micro-batches, about 30 s left

`text.py` has the arithmetic and the words, `phases.py` what a phase is, `screen.py` where and when a line is written,
and `live.py` the display of this process.
"""
