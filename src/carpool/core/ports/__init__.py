"""The ports, with their contracts in prose: Clock, HttpClient, Store, Dialect.

Every implementation must keep these contracts; `tests/contract` runs one suite over all implementations of a port.
"""

from carpool.core.clock import Clock
from carpool.core.ports.dialect import (
    Allowance,
    Allowances,
    Ask,
    BatchLimits,
    BatchReport,
    CacheEdits,
    Capability,
    Claim,
    Dialect,
    Document,
    EditedBody,
    FlexTier,
    ModelTable,
    Parsed,
    Pricing,
    RawRequest,
    Refusal,
    ResponseEnd,
    ResultLine,
    ResultPages,
    UploadNames,
    Uploads,
    UsageTap,
    WebhookEvent,
    WebhookReader,
)
from carpool.core.ports.http import (
    HttpClient,
    HttpRequest,
    HttpResponse,
    PushClient,
    RequestHandle,
    ResponseReceiver,
    StreamedBody,
)
from carpool.core.ports.store import (
    BatchStore,
    CallStore,
    ForecastStore,
    KeyStore,
    LeaseStore,
    LedgerStore,
    ListingStore,
    ShapeStore,
    Store,
    TaskStore,
)
