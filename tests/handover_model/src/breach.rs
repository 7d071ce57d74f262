//! What must never happen.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Breach {
    /// A page was stored that is not this attempt's, at this place, as it was computed.
    StalePageAccepted,
    /// Bytes came into a page that is not reserved for the leg that they are for.
    WrittenByStranger,
    /// A leg that runs has other pages than it should.
    RunsOnForeignPage,
    /// A leg was told of as ended twice.
    EndedTwice,
    /// A token came twice, out of order, or after the answer's end.
    TokenOutOfOrder,
    /// The request was answered twice.
    AnsweredTwice,
}
