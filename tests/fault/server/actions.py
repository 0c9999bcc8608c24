"""What a scripted fault does to one request: the Action, and a constructor for each kind of fault.

An exchange passes the stages ``head`` (headers are here), ``body`` (being read), ``handle`` (body is here, nothing done
yet), ``reply`` (the operation is done, nothing sent yet), ``send`` (being sent) and ``sent``. A gate at ``late`` takes the
operation out of this order: the scripted answer or ending comes at once, the operation is done when the gate opens.
Actions are joined with ``|``: ``delay(0.5) | error(503, "SlowDown")``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from .model import Tamper
from .request import ERROR_STATUS, Reply, error_reply

Stage = Literal["head", "body", "handle", "late", "reply", "send", "sent"]
Ending = Literal["", "reset", "close", "stall"]
_TAG = r"(?s)<ETag>.*?</ETag>"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A scripted reply; without ``body`` an S3 error document is made from ``code``."""

    status: int
    code: str = ""
    body: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def reply(self, resource: str, request_id: str) -> Reply:
        """Build the reply."""
        if self.body is None:
            reply = error_reply(self.status, self.code, f"scripted: {self.code}", resource, request_id)
        else:
            reply = Reply(self.status, {}, [self.body.encode("utf-8")], code=self.code or None)
        reply.headers |= self.headers
        return reply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """The deviations of one exchange; every field at its default means "as usual"."""

    gates: tuple[tuple[Stage, str], ...] = ()
    """Stages at which to wait for a named gate."""
    delay_s: float = 0.0
    """Wait before the operation is done."""
    delay_reply_s: float = 0.0
    """Wait after it is done, before the reply."""
    ending: Ending = ""
    """Break off: TCP reset, orderly close, or keep the connection open and do nothing more."""
    ending_at: Stage = "reply"
    """Where to break off. "reply" with "close" is commit-then-drop."""
    after_bytes: int = 0
    """For an ending at "body" or "send": bytes of the body that pass first."""
    answer: Answer | None = None
    """Reply with this in place of the real reply."""
    answer_at: Stage = "handle"
    """"head": body not even read; "handle": operation not done; "reply": operation done, then this reply."""
    reply_headers: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Headers to set, or to leave out (None), in the reply."""
    rewrite: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements for the reply's body (Content-Length follows)."""
    flip_reply_at: int | None = None
    """Flip the lowest bit of this byte of the reply's body (not in the store)."""
    drip_bytes: int = 0
    """Send the reply's body (or its head, if it has none) in pieces of so many bytes …"""
    drip_every_s: float = 0.0
    """… one per this time."""
    tamper: Tamper | None = None
    """Damage what the operation stored, behind its good reply: flip, truncate or lose the part or object."""
    tamper_at: int = 0
    """Byte to flip (negative: from the end), or size to cut to."""

    @property
    def lands_late(self) -> bool:
        """Whether the operation is done behind the back of the reply."""
        return any(stage == "late" for stage, _ in self.gates)

    def __or__(self, other: Action) -> Action:
        """Join: gates, headers and rewrites add up; other fields are taken from ``other`` where it sets them."""
        merged = {
            field.name: getattr(other if getattr(other, field.name) != field.default else self, field.name)
            for field in dataclasses.fields(Action)
            if field.name not in ("gates", "reply_headers", "rewrite", "ending_at", "answer_at")
        }
        return Action(
            **merged,
            gates=self.gates + other.gates,
            reply_headers={**self.reply_headers, **other.reply_headers},
            rewrite=self.rewrite + other.rewrite,
            ending_at=(other if other.ending else self).ending_at,
            answer_at=(other if other.answer is not None else self).answer_at,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` understands."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Action:
        """Rebuild an action from plain data."""
        fields = dict(data)
        if fields.get("answer") is not None:
            fields["answer"] = Answer(**fields["answer"])
        for name in ("gates", "rewrite"):
            fields[name] = tuple(tuple(pair) for pair in fields.get(name, ()))
        return cls(**fields)

    def apply_rewrites(self, body: bytes) -> bytes:
        """Return ``body`` after the rewrites."""
        text = body.decode("latin-1")
        for pattern, replacement in self.rewrite:
            text = re.sub(pattern, replacement, text, count=1)
        return text.encode("latin-1")


def error(
    status: int,
    code: str = "",
    *,
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry_after: str | int | None = None,
    at: Literal["head", "handle", "reply"] = "handle",
) -> Action:
    """Answer ``status`` with an S3 error document, or with ``body`` ("" for an empty one).

    ``at="head"`` answers without reading the body, ``at="reply"`` after the operation was done.
    """
    extra = dict(headers or {}) | ({} if retry_after is None else {"Retry-After": str(retry_after)})
    return Action(answer=Answer(status, code, body if body is not None or code else "", extra), answer_at=at)


def s3_error(code: str, *, at: Literal["head", "handle", "reply"] = "handle") -> Action:
    """Answer with an S3 code and its usual status."""
    return error(ERROR_STATUS[code], code, at=at)


def delay(seconds: float = 0.0, *, reply_s: float = 0.0) -> Action:
    """Wait before the operation is done, and ``reply_s`` between that and the reply."""
    return Action(delay_s=seconds, delay_reply_s=reply_s)


def reset(at: Stage = "handle", after_bytes: int = 0) -> Action:
    """Reset the connection; at "body" after so many bytes were read, at "send" after so many were sent."""
    return Action(ending="reset", ending_at=at, after_bytes=after_bytes)


def drop_reply(how: Literal["close", "reset"] = "close") -> Action:
    """Do the operation, then end the connection without a reply."""
    return Action(ending=how, ending_at="reply")


def never_read() -> Action:
    """Leave the request's body unread, keep the connection open."""
    return Action(ending="stall", ending_at="head")


def never_answer(*, commit: bool = False) -> Action:
    """Read the request, do the operation only if ``commit``, and never reply."""
    return Action(ending="stall", ending_at="reply" if commit else "handle")


def cut_reply(after_bytes: int, how: Literal["close", "reset", "stall"] = "close") -> Action:
    """Send the reply's head and so many bytes of its body, then break off."""
    return Action(ending=how, ending_at="send", after_bytes=after_bytes)


def drip(every_s: float = 1.0, piece_bytes: int = 1) -> Action:
    """Send the reply piece by piece."""
    return Action(drip_bytes=piece_bytes, drip_every_s=every_s)


def reply_headers(headers: Mapping[str, str | None]) -> Action:
    """Send wrong headers (a value) or leave headers out (None)."""
    return Action(reply_headers=dict(headers))


def rewrite(pattern: str, replacement: str) -> Action:
    """Change the first match of a regular expression in the reply's body."""
    return Action(rewrite=((pattern, replacement),))


def flip_reply(at: int = 0) -> Action:
    """Flip a bit of the reply's body on its way."""
    return Action(flip_reply_at=at)


def flip_stored(at: int = 0) -> Action:
    """Acknowledge, then flip a bit of the stored part or object."""
    return Action(tamper="flip", tamper_at=at)


def truncate_stored(size: int) -> Action:
    """Acknowledge, then cut the stored part or object to ``size`` bytes."""
    return Action(tamper="truncate", tamper_at=size)


def lose_stored() -> Action:
    """Acknowledge, then lose the part (Complete joins the rest) or the object."""
    return Action(tamper="lose")


_INTERNAL = '<?xml version="1.0" encoding="UTF-8"?>\n{}<Error><Code>{}</Code><Message>scripted</Message></Error>'

ODD_COMPLETES: dict[str, Action] = {
    "internal-error": error(200, body=_INTERNAL.format("", "InternalError")),
    "slow-down": error(200, body=_INTERNAL.format("", "SlowDown")),
    "blanks-then-error": error(200, body=_INTERNAL.format(" \n" * 40, "InternalError")),
    "blanks-then-result": rewrite(r"\A", " \n" * 40),
    "empty": error(200, body="", at="reply"),
    "empty-not-done": error(200, body=""),
    "cut-at-60": rewrite(r"(?s)\A(.{60}).*", r"\1"),
    "no-etag": rewrite(_TAG, ""),
    "empty-etag": rewrite(_TAG, "<ETag></ETag>"),
    "foreign-etag": rewrite(_TAG, '<ETag>"00000000000000000000000000000000-1"</ETag>'),
}
"""Answers of CompleteMultipartUpload with status 200 that are not, or not plainly, a success."""
