// The extension module guard.native._core. Each part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_records(nb::module_& m);
void bind_otlp(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_board(nb::module_& m);
void bind_digest(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_journal(nb::module_& m);
void bind_core(nb::module_& m);

NB_MODULE(_core, m) {
    m.doc() = "The native core: records, OTLP decoder, ring, ledger, board, journal, page hash.";
    nb::set_leak_warnings(false);
    bind_records(m);
    bind_otlp(m);
    bind_ring(m);
    bind_board(m);
    bind_digest(m);
    bind_ledger(m);
    bind_journal(m);
    bind_core(m);
}
