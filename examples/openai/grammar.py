"""`response_format`: JSON that follows a schema, with llguidance."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from outrider import OutriderError, TextEngine

from .requests import Requests

_tokens: WeakKeyDictionary[TextEngine, Any] = WeakKeyDictionary()  # llguidance's tokenizers


def constrained(engine: TextEngine, bundle: Path, requests: Requests, schema: str) -> Requests:
    """The requests, with logits processors that forbid what the JSON schema does not allow. Raises
    OutriderError "option"."""
    try:
        from llguidance import LLMatcher

        from ..json_schema import Grammar, tokens_of
    except ImportError as error:
        remedy = "Install it on the server: python -m pip install llguidance"
        raise OutriderError("option", f"response_format: {error}", remedy) from None
    if engine not in _tokens:
        _tokens[engine] = tokens_of(engine, bundle)
    tokens = _tokens[engine]
    grammar = LLMatcher.grammar_from_json_schema(schema)
    if error := LLMatcher.validate_grammar(grammar, tokens):
        cause = f"response_format has a schema that cannot be followed: {' '.join(error.split())}"
        raise OutriderError("option", cause, "Change the schema")
    return [
        (prompt, replace(options, processors=[Grammar(tokens, grammar)]))
        for prompt, options in requests
    ]
