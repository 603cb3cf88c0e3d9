"""A passage in the manner of the plays, written for this workbench: a text to read where no corpus is at hand.

It uses characters of Tiny Shakespeare only, speakers' names in capitals and lines of verse, so that what a model learned from
the plays applies. It is nobody's, and in no training text.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from models.errors import WorkbenchError
from models.hooked import vocabulary_of
from models.protocol import Model

PASSAGE = """\
FIRST WATCHMAN:
Who walks there by the wall? Stand still and speak,
Or I shall wake the captain with my horn.

OLD PEDLAR:
A poor man, sir, with ribbons in a box;
I lost the road when all the lamps went out,
And every lane did seem the lane I left.

SECOND WATCHMAN:
He hath an honest voice. What is the hour?

FIRST WATCHMAN:
'Tis three, and colder than a widow's hearth.
Come near, good father; warm thy hands with us.
What news is in the villages below?

OLD PEDLAR:
They say the duke will marry ere the spring,
And that the lady weeps both night and day;
They say the river rose above the bridge
And bore away the miller and his mill.
I saw it not. I sell, sir; I believe
What pays me best, and that is mostly love.

SECOND WATCHMAN:
Why weeps the lady?

OLD PEDLAR:
For she loves the mill.

FIRST WATCHMAN:
Thou art a merry knave! Go on, go on:
I had a cousin in that very town,
A baker, with three daughters and a dog,
And never did he write me but for bread.

OLD PEDLAR:
Then he is well, my lord, for well I know
The smell of bread was on the wind that day.
But hear me now: behind me on the hill
I heard the tread of horses, ten or more,
And no man sang, and no man struck a light.

SECOND WATCHMAN:
No light? And ten of them? Now by my faith,
I like it not. What colour were their coats?

OLD PEDLAR:
As black as is the inside of my purse.

FIRST WATCHMAN:
Go, wake the captain! Bid him bring the keys,
And let the women keep within the church.
Old man, stay here, and if thy tale be false
Thy ribbons all are mine, and so art thou.

CAPTAIN:
What is this noise? Who called me from my bed?

FIRST WATCHMAN:
My captain, there are riders on the hill;
This fellow saw them, and he swears to it.

CAPTAIN:
He saw them in the dark, without a lamp?
Then are his eyes the wonder of our age.
Peace, friend. I sent those riders forth myself;
They keep the road for such as thou art. Sleep!

OLD PEDLAR:
I thank your honour. Will you buy a ribbon?
"""


class PassageError(WorkbenchError):
    """The passage cannot be read by a model; the message says why and what to do."""


def passage_windows(model: Model, length: int | None = None) -> Int[Tensor, "batch position"]:
    """The passage in consecutive windows, the last partial one left out.

    Args:
        length: positions of a window; the model's n_ctx unless given.

    Raises:
        PassageError: the model does not know a character of it.
    """
    vocabulary = vocabulary_of(model)
    unknown = sorted(set(PASSAGE) - set(vocabulary.characters))
    if unknown:
        raise PassageError(f"the model does not know {unknown[0]!r}, which the built-in passage has; give a text of your own")
    length = min(length or model.cfg.n_ctx, model.cfg.n_ctx)
    ids = torch.as_tensor(vocabulary.encode(PASSAGE))
    return ids[: len(ids) // length * length].reshape(-1, length).to(model.cfg.device)
