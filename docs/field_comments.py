"""An extension of Griffe: the comment at the end of a field's line is the field's documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from griffe import Docstring, Extension

if TYPE_CHECKING:
    from griffe import Attribute


class FieldComments(Extension):
    """Takes `name: type  # what it holds` for a field of a class that has no docstring of its own."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Give a field its comment as docstring."""
        comment = attr.lines[-1].partition("  # ")[2] if attr.lines else ""
        is_said = comment and not comment.startswith(("type:", "noqa"))
        if is_said and attr.docstring is None and attr.parent is not None and attr.parent.is_class:
            attr.docstring = Docstring(comment, parent=attr, lineno=attr.lineno, endlineno=attr.endlineno)
