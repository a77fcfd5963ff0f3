"""Errors of the endpoint picker.

EndpointPickerError        the message says what to do next
├── BadEndpoint            a URL of an endpoint cannot be used
└── BadCertificate         the certificate or its key cannot be used
"""

from __future__ import annotations


class EndpointPickerError(Exception):
    pass


class BadEndpoint(EndpointPickerError):
    pass


class BadCertificate(EndpointPickerError):
    pass
