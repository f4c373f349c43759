"""What is wrong with a host, found before anything serves: `tandem doctor`, and workers' starts.

Pure functions over a root folder (normally /), of which sys, proc and dev are read; nothing is
changed, nothing beyond the standard library is needed. `examine` puts the checks together.
"""
