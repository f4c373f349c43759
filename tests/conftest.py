"""No deadline for an example of a property: a machine that is busy with something else stops a test
for longer than any.
"""

from hypothesis import settings

settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
