"""The native engine: decodes in the trainer's process, with the trainer's weights.

``engine.py`` takes the requests, ``scheduler.py`` gives requests rows of a key-value cache, and ``decoder.py`` runs
the model and draws the tokens. ``kv_cache.py`` and ``slot_cache.py`` are the two forms of the cache; with slots,
``graphs.py`` records a decoding step as a CUDA graph. ``session.py`` keeps keys between the turns of a dialogue.

The model code is transformers' own. It hands a cache down to poise's attention function (``decoding=``), which calls
``keep`` with the keys and values of prompts that are being read, and ``attend`` for one new token in every row; so does
the fused step.

The life of a row, for four rows and the requests A, B (one group: the same prompt p) and C, D (prompt q):

1. *A prompt is read.* All unread prompts run through the model, packed end to end. ``assign`` gives each prompt a
   home, ``keep`` stores its keys there, and ``keep_states`` the last hidden state, from which the first token is drawn.
2. *Rows are taken.* ``occupy`` ties rows to prompts::

       row      0   1   2   3
       request  A   B   C   D        first 4 rows decoded

3. *Decoding.* Only the first n rows take part, so nothing is gathered for a step. ``set_lengths`` says how long the
   rows are, ``begin_step`` works out what all layers share, ``attend`` stores the new key in each row and attends to
   everything before it, ``advance`` counts the new token. After a few steps the host looks at the tokens.
4. *A row is freed* (``free``) when its response has ended. A waiting request takes it at once. Here nobody waits::

       row      0   1   2   3
       request  A   –   C   D        B has ended

5. *Rows close up* (``move``): the last sequences move into the holes, so that fewer rows are decoded::

       row      0   1   2   3
       request  A   D   C   –        first 3 rows decoded; row 3 may be reused

6. ``clear`` forgets everything at the start of the next call, because the weights may have changed.

In a dialogue of several turns a row has a second life. ``copy_out`` saves its keys when its response has ended (all but
the last token's, which may not have been computed yet). When the next turn takes a row, ``copy_in`` puts the keys back
as the beginning of its prompt, and only the new text runs through the model: ``attend_text`` lets it see the keys that
are there. From then on it is a row like any other. ``session.py`` decides which rows are saved, and for how long.

The two forms differ in where a home is:

- ``SharedPromptCache`` (CPU, and CUDA dtypes without a flash kernel): a prompt's keys are stored once and shared by its
  group. A row holds only the keys of its response, and the room per row doubles when it is full. A home is a place
  among the prompts; it is given up with the last sequence of its group, and the last prompt moves there. Shapes change
  from step to step.
- ``SlotCache`` (CUDA, half precision): a row is a slot of fixed length for prompt and response. A prompt is read into
  the first row of its group and copied to the others; its home is any row that still holds it. Shapes and addresses
  never change, so a decoding step can be recorded as a CUDA graph.

Letters in shapes: S rows (slots), P prompts, n rows that are decoded, H query heads, G key heads, D width of a head,
L packed tokens, T tokens of one row, W width of the hidden state.
"""
