"""The share of texts that are valid Python so far: a text that breaks off in the middle counts, one with a syntax error does not.

Nothing is run.

Args:
    predictions: texts.
    references: the source that each of them continues; empty where it continues none.
"""

from specdistill.measurement.quality import is_python_so_far, share

PythonSyntax = share("python_syntax", __doc__, lambda text, prompt: is_python_so_far(prompt + text))
