"""``tandem bench pair``: a prefill and a decode instance of this host, under load, and each alone.

The processes are those of ``tandem up``, started as plain children: no Ray. The model is a named
shape with invented weights. The key idea: what is asked is how much of its slower side's rate a
pair keeps, so both sides are also measured alone, in the same processes at the same settings.
"""
