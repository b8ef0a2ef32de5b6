"""A calculator: the model writes `<calc>12 * (3 + 4)</calc>`, and a message of a tool has the
value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain.train.environments import Message

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
LONGEST = 200
"""Characters of an expression."""
DIGITS = 1e15
"""Numbers from here on are refused: they would be digits of rounding."""
OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(messages: Sequence[Message], columns: Mapping[str, Any]) -> list[Message] | None:
    """Return the value of the last expression that the model asked for; None if it asked for
    none.
    """
    calls = CALL.findall(messages[-1]["content"])
    if not calls:
        return None
    try:
        text = f"{value(calls[-1]):.12g}"
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        text = f"error: {error}"[:LONGEST]
    return [{"role": "tool", "content": text}]


def value(text: str) -> float:
    """Return the value of sums, products and quotients of numbers.

    Raises:
        SyntaxError, ValueError: it is something else, or too large.
        ZeroDivisionError: a divisor is 0.
    """
    if len(text) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    found: float
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            found = number
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            found = OPERATORS[type(kind)](_value(left), _value(right))
        case ast.UnaryOp(kind, inner) if type(kind) in OPERATORS:
            found = OPERATORS[type(kind)](_value(inner))
        case _:
            raise ValueError("only numbers and + - * / ( ) are known")
    if not abs(found) < DIGITS:
        raise ValueError("the value is too large")
    return found


ENVIRONMENT = calculator
