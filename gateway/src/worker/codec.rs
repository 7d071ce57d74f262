//! How messages of the contract become bytes: protobuf, as prost writes it, made in one piece of memory first.
//!
//! tonic's own codec writes into its send buffer byte by byte, with a function call and a check of capacity for each:
//! for the token ids of a long prompt, which are most of what the gateway sends, that was half of all its work. A plain
//! vector takes the same bytes inline, and goes over in one copy.

use std::marker::PhantomData;

use bytes::BufMut;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic_prost::{ProstCodec, ProstDecoder};

/// Sends `T` and receives `U`.
#[derive(Clone, Debug)]
pub struct ContractCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for ContractCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for ContractCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ContractEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ContractEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::default().decoder()
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct ContractEncoder<T>(PhantomData<T>);

impl<T: Message> Encoder for ContractEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, message: T, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(&message.encode_to_vec());
        Ok(())
    }
}
