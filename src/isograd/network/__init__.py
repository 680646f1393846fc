"""isograd check network: what the machines of a run are to each other, before a run finds out.

facts.py    what a rank says of itself: machine, address, versions, code
line.py     what two ranks measure between them: latency, bandwidth, clocks
survey.py   all ranks meet, and all pairs measure
judge.py    what is wrong, and with which ranks
command.py  the command line
"""
