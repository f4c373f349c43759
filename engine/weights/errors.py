"""What is wrong with a checkpoint, told by tensor."""

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model; the message names the tensor and its file.

    Attributes:
        tensor: name of the (first) tensor concerned, or empty if a file is the matter.
        file: the file concerned, or the checkpoint folder.
    """

    def __init__(self, problem: str, *, file: Path, tensor: str = "") -> None:
        where = f"{tensor} in {file}" if tensor else str(file)
        super().__init__(f"{where}: {problem}")
        self.tensor = tensor
        self.file = file
