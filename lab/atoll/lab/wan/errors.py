"""Errors of the WAN lab."""

from __future__ import annotations

from typing import ClassVar

from atoll.core.errors import AtollError, ConfigError, ExitCode


class TopologyError(ConfigError):
    """A topology file is not valid; the message names the field."""


class LabUnavailable(AtollError):
    """This machine or user cannot create network namespaces and TUN devices."""

    exit_code: ClassVar[ExitCode] = ExitCode.CONFIG


class LabBroken(AtollError):
    """The lab's processes or devices failed while it ran."""
