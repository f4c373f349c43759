"""How a checkpoint, real or dummy, becomes the parameters of one rank."""
