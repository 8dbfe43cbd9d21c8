"""Which kinds of keys a certificate may have: those that gRPC's clients take, which are fewer than OpenSSL's.

gRPC's BoringSSL serves certificates with Ed25519 and P-521 as well, while none of its clients can connect then, and
nothing tells why.
"""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, EllipticCurvePublicKey
from cryptography.x509 import Certificate, PublicKeyAlgorithmOID

from moe_autograd.wire.x509 import certificates_in

TAKEN = "RSA, or ECDSA with P-256 or P-384"
_NAMES = {
    PublicKeyAlgorithmOID.RSASSA_PSS: "RSA-PSS",
    PublicKeyAlgorithmOID.ED25519: "Ed25519",
    PublicKeyAlgorithmOID.ED448: "Ed448",
}
_CURVES = {"secp224r1": "P-224", "secp521r1": "P-521"}


def kind_not_taken(pem: bytes) -> str | None:
    """Return the kind of the first certificate's key, if gRPC's clients do not take it; OpenSSL has read it before."""
    for certificate in certificates_in(pem)[:1]:
        kind = certificate.public_key_algorithm_oid
        if kind == PublicKeyAlgorithmOID.EC_PUBLIC_KEY:
            return _curve_not_taken(certificate)
        if kind != PublicKeyAlgorithmOID.RSAES_PKCS1_v1_5:
            return _NAMES.get(kind, f"another kind, of object identifier {kind.dotted_string}")
    return None


def _curve_not_taken(certificate: Certificate) -> str | None:
    try:
        key = certificate.public_key()
    except (UnsupportedAlgorithm, ValueError):
        return "another kind, of a curve that is not known"
    assert isinstance(key, EllipticCurvePublicKey)
    return (
        None if isinstance(key.curve, (SECP256R1, SECP384R1)) else _CURVES.get(key.curve.name, key.curve.name)
    )
