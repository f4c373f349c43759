"""Finding slow ranks: played ranks that keep step, and how often what is wrong with them is found.

python -m bench.ranks.detection --windows 2000
"""
