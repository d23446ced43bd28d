"""The native engine: decodes in the trainer's process, with the trainer's weights.

``engine.py`` receives the requests, ``scheduler.py`` assigns them to rows of a key-value cache, and ``decoder.py`` runs
the model and draws the tokens. The cache has two forms, ``kv_cache.py`` and ``slot_cache.py``; with a slot cache,
``graphs.py`` records a decoding step as a CUDA graph. ``session.py`` keeps keys between the turns of a dialogue.

The model code is transformers' own. It passes the cache (``decoding=``) to poise's attention function. That function
calls the cache's ``keep`` with the keys and values of prompts, and the cache's ``attend`` for one new token in every
row. The fused step also calls ``attend``.

The life of a row, for four rows and the requests A, B (one group: the same prompt p) and C, D (prompt q):

1. *A prompt is read.* All unread prompts run through the model, packed end to end. ``assign`` assigns each prompt a
   home: the index of its keys in the cache. ``keep`` stores the keys there; ``keep_states`` stores the last hidden
   state, from which the first token is drawn.
2. *Rows are taken.* ``occupy`` assigns each row its prompt::

       row      0   1   2   3
       request  A   B   C   D        first 4 rows decoded

3. *Decoding.* A step decodes the first n rows, so it needs no gather. ``set_lengths`` sets the rows' lengths,
   ``begin_step`` computes the tensors that all layers share, ``attend`` stores each row's new key and attends to all
   keys of the row, and ``advance`` counts the new token. After a few steps the host looks at the tokens.
4. *A row is freed* (``free``) when its response has ended. The next waiting request takes it; here no request waits::

       row      0   1   2   3
       request  A   –   C   D        B has ended

5. *Rows close up* (``move``): the last sequences move into free rows, so that fewer rows are decoded::

       row      0   1   2   3
       request  A   D   C   –        first 3 rows decoded; row 3 may be reused

6. ``clear`` forgets all sequences at the start of the next call, because the weights may have changed.

In a dialogue of several turns, a row's keys are reused. When the response has ended, ``copy_out`` saves the keys,
except the last token's key, which may not have been computed yet. When the next turn takes a row, ``copy_in`` copies
the saved keys to the start of the new prompt. Only the new text runs through the model, and ``attend_text`` attends
from the new text to all keys before it. After that, decoding is the same as without saved keys. ``session.py`` decides
which rows are saved, and for how long.

The two forms of the cache store prompts differently:

- ``SharedPromptCache`` (CPU, and CUDA without a suitable flash kernel): a prompt's keys are stored once for its group.
  A row holds only the keys of its response; when a row is full, the room per row doubles. A home is an index among the
  prompts. When the last sequence of a group ends, its home is freed, and the last prompt moves there. Shapes change
  from step to step.
- ``SlotCache`` (CUDA, half precision): a row is a slot of fixed length for prompt and response. A prompt is read into
  the first row of its group and copied to the others. A home is any row that still holds the prompt. Shapes and
  addresses never change, so a decoding step can be recorded as a CUDA graph.

Letters in shapes: S rows (slots), P prompts, n decoded rows, H query heads, G key heads, D width of a head, L packed
tokens, T tokens of one row, W width of the hidden state.
"""
