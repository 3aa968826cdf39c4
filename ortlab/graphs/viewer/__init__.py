"""Graphs drawn in a notebook's cell, by the installed netron, without a server or a network."""

from ortlab.graphs.viewer.document import SANDBOX, Document, document

__all__ = ["SANDBOX", "Document", "document"]
